"""Run scripts in new processes that are forked from one that has imported PyTorch and `transformers`.

This saves about five seconds each."""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
OUTPUTS = "stdout", "stderr"
# No chapter is preloaded, because exercises replace a chapter's file. This module comes last.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([
    "torch", "torch.nn.attention.bias", "transformers", "transformers.models.llama.modeling_llama", "hypothesis", "pytest", "numpy",
    "shell.checkpoint", "shell.lesson", "shell.backends", "tests.support.forked"])  # fmt: skip
gc.freeze()  # collections in forked processes skip all that was imported before
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a pytest in a forked process needs no plugins, and starts sooner


def run(folder: Path, *words, timeout: float = 600, **how) -> subprocess.CompletedProcess:
    """Run `python *words` (see `start`) and wait until it ends, or kill it after `timeout` seconds."""
    process = start(folder, *words, **how)
    process.join(timeout)
    process.kill()  # in case it has not ended
    process.join()
    outputs = ((folder / name).read_text("utf-8") for name in OUTPUTS)
    return subprocess.CompletedProcess(words, process.exitcode, *outputs)


def start(folder: Path, *words, path: Path = ROOT, **environment) -> multiprocessing.Process:
    """Start `python *words`: a script, or -m and a module, then options.

    `folder`: gets the files stdout and stderr. `path`: is searched first for modules. `environment`: more environment
    variables."""
    for output in (outputs := [folder / name for name in OUTPUTS]):
        output.touch()
    process = context.Process(target=execute, args=([*map(str, words)], outputs, str(path), environment), daemon=True)
    process.start()
    return process


def execute(words: list[str], outputs: list[Path], path: str, environment: dict):
    from huggingface_hub import constants
    constants.HF_HUB_OFFLINE = True  # HF_HUB_OFFLINE=1 would come too late: it was read at the import
    os.environ.update(environment)
    os.chdir(ROOT)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
    for stream, output in zip((sys.stdout, sys.stderr), outputs):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
        stream.reconfigure(encoding="utf-8", write_through=False, line_buffering=False)
    sys.path[:0] = [path]
    sys.argv, sys.orig_argv = words[words[0] == "-m" :], [sys.executable, *words]  # rank 0 starts other ranks with orig_argv
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
