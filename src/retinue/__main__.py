"""`python -m retinue`."""

from .cli import main

raise SystemExit(main())
