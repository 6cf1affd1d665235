"""Scripts that run in processes of their own without importing PyTorch and Transformers each time, which takes seconds.

Run as a program, this file imports both and then forks for whatever it is told to run. That runs as `python SCRIPT ...` would:
with its own pipes, working directory, environment, signals and exit code, and it ends as an interpreter ends. What it shares with
the others is what was imported, and the seed of hash(): whatever may depend on either needs a Python of its own.
"""
import functools
import gc
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

ANSWER = struct.Struct("i")
MOST = 1 << 16                     # bytes of what is asked


# The side that forks ---------------------------------------------------------------------------------------------

def serve(control):
    """Fork for each message, until nobody can send one any more."""
    import flask  # noqa: F401
    import torch._dynamo  # noqa: F401                             # which PyTorch imports later, and is more than half of it all
    import werkzeug.serving  # noqa: F401
    from huggingface_hub import snapshot_download  # noqa: F401
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
    with torch.device("meta"):                                      # as when a model is allocated
        torch.arange(2)
    gc.freeze()                                                     # so that no process copies what it only looks through
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)                   # nobody waits for the keepers
    while True:
        message, files, *_ = socket.recv_fds(control, MOST, 3)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            return keep(json.loads(message), *files)
        for file in files:
            os.close(file)


def keep(asked: dict, said: int, out: int, err: int):
    """Start it, say its number, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if process == 0:
        os.close(said)
        return become(asked, out, err)
    for file in (out, err):
        os.close(file)
    os.write(said, ANSWER.pack(process))
    os.write(said, ANSWER.pack(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])))
    os._exit(0)


def become(asked: dict, out: int, err: int):
    """Be `python SCRIPT ...`."""
    for file, number in ((out, 1), (err, 2)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")
    sys.stdout = sys.__stdout__ = open(1, "w", encoding=encoding, errors=errors or "strict", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding=encoding, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)         # a shell may have had it ignored
    tempfile.tempdir = None
    sys.argv = asked["words"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


# The side that asks ----------------------------------------------------------------------------------------------

def available() -> bool:
    """Other systems have no fork, or libraries that do not survive one."""
    return sys.platform == "linux"


@functools.cache
def forking(offline: str) -> socket.socket:
    """Start it; it ends when the socket is closed, at the latest with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], start_new_session=True,
                         env={**os.environ, "HF_HUB_OFFLINE": offline})
    return ours


def rest(file) -> bytes:
    return b"" if file is None or file.closed else file.read()


class Process:
    """What subprocess.Popen would be, as far as needed here."""

    def __init__(self, words: list, environment: dict, together: bool):
        asked = dict(words=[os.fsdecode(word) for word in words], environment=environment, folder=os.getcwd())
        message = json.dumps(asked).encode()
        assert len(message) < MOST
        self.returncode = None
        self.said, said = socket.socketpair()
        self.said.settimeout(120)                                   # the first one waits for the imports
        out, out_there = os.pipe()
        err, err_there = (None, out_there) if together else os.pipe()
        self.stdout, self.stderr = (None if file is None else open(file, "rb", 0) for file in (out, err))
        with said:
            socket.send_fds(forking(environment["HF_HUB_OFFLINE"]), [message], [said.fileno(), out_there, err_there])
        for file in {out_there, err_there}:
            os.close(file)
        self.pid, = ANSWER.unpack(self.said.recv(ANSWER.size))

    def send_signal(self, number: int):
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 120):
        """-> what else it says, when it has ended. One that does not end in time is killed."""
        alarm = threading.Timer(timeout, self.kill)
        alarm.start()
        try:
            with ThreadPoolExecutor(2) as readers:
                said = list(readers.map(rest, (self.stdout, self.stderr)))
            if self.returncode is None:
                self.said.settimeout(timeout)
                self.returncode, = ANSWER.unpack(self.said.recv(ANSWER.size))
        finally:
            alarm.cancel()
        for file in (self.stdout, self.stderr, self.said):
            if file is not None:
                file.close()
        return said


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
