"""Runs a module or a program text for Kiwi. Python gets this file's path: see ``interpreter``.

``start.py MODULE WORD …`` is ``python -m MODULE WORD …``, and ``start.py -c TEXT WORD …`` is
``python -c``, both without the working directory on ``sys.path``. Imports nothing of Kiwi.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))


def name_process(words: list[str]) -> None:
    """Let `top`, `pgrep` and `ps -o comm` show `kiwi-daemon` and `kiwi-movers`, not `python`."""
    package, _, module = words[0].rpartition(".")
    if package.partition(".")[0] == "kiwi_core":
        name = words[1:2] if module == "cli" else [module]
        try:
            with open("/proc/self/comm", "w") as comm:
                comm.write("-".join(["kiwi", *name]))
        except OSError:  # without /proc nothing shows it either
            pass


def main() -> None:
    # Python has put this directory first: its modules (errors, config …) would shadow others'.
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != HERE]
    import importlib.util
    import runpy

    # Load the same Kiwi as the starter's, even if PYTHONPATH named it from another directory.
    spec = importlib.util.spec_from_file_location("kiwi_core", os.path.join(HERE, "__init__.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules["kiwi_core"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    if importlib.util.find_spec("kiwi_emulator") is None:
        sys.path.append(os.path.dirname(HERE))
    if sys.argv[1] == "-c":
        text = sys.argv[2]
        sys.argv[:] = ["-c", *sys.argv[3:]]
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = sys.argv[1:]
        name_process(sys.argv)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
