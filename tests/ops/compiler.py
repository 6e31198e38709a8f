"""Sources run without Triton's interpreter, each in a process forked from one that has loaded torch and Triton."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHARED_MEMORY = 232_448  # bytes a block may have on compute capability 9.0
SECONDS = 500  # that a source may take

SERVER = """
import json, os, signal, sys, traceback
import torch
import longreach.ops.attend.triton
import longreach.testing.compile, longreach.testing.inputs

torch.set_num_threads(1)
for line in sys.stdin:
    source, arguments, folder, seconds = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        signal.alarm(seconds)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
        try:
            sys.argv = ["-c", *arguments]
            exec(compile(source, "<source>", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """One of this process; it ends when this process does, with its standard input."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SERVER]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def printed(source: str, *arguments: object) -> Any:
    """What Python source prints last, from JSON; its sys.argv[1:] are `arguments`. Fails with its standard error."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([source, [*map(str, arguments)], folder, SECONDS]), file=server.stdin, flush=True)
        code = server.stdout.readline().strip()
        out, err = (Path(folder, name).read_text() if code else "" for name in ("out", "err"))
    assert code == "0", err[-3000:] or f"the source ended with {code or 'its server'}"
    return json.loads(out.splitlines()[-1])
