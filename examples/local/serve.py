"""An OpenAI-compatible server for a small language model on this machine; run by the Python that has xllamacpp.

    python serve.py MODEL.gguf PORT

It ends when its standard input does, so that it cannot outlive whoever started it.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    model, port = sys.argv[1], int(sys.argv[2])
    xllamacpp: Any = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostname, params.port = "127.0.0.1", port
    params.n_ctx = 2048
    params.n_parallel = 1
    params.cpuparams.n_threads = 1  # two on a busy machine of two cores wait for each other
    params.cpuparams_batch.n_threads = 1
    params.use_jinja = True  # tool calls need it; the template of the weights leaves tools out
    params.chat_template = (Path(__file__).parent / "chatml.jinja").read_text()
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main()
