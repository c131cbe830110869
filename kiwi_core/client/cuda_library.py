"""Which CUDA driver library this process has loaded, if any."""

from __future__ import annotations


def loaded_cuda_library() -> str:
    """Return the path of the ``libcuda.so`` mapped into this process, or "".

    Loads nothing. The daemon needs the path: a real driver and an emulating daemon do not mix.
    """
    try:
        with open("/proc/self/maps", "rb") as maps:
            for line in maps:
                if b"/libcuda.so" in line:
                    # address perms offset dev inode path; the path may hold spaces
                    path = line.split(None, 5)[5].rstrip(b"\n")
                    return path.decode(errors="replace")[:4096]
    except OSError:
        pass  # no /proc: the path cannot be known
    return ""
