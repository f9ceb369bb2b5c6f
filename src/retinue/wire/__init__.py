"""Wire formats as pure functions of events. No I/O."""
