"""A notebook that idles with GPU memory until its kernel is ended. Prints what stands below the
cell."""

from contextlib import suppress
from pathlib import Path
from queue import Empty
from uuid import uuid4

from jupyter_client.manager import KernelManager
from jupyter_core.paths import jupyter_runtime_dir

TAKE = """
from cuda.bindings import driver as cuda
cuda.cuInit(0)
cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(cuda.cuDeviceGet(0)[1])[1])
memory = cuda.cuMemAlloc(300 << 20)[1]
block = bytes(1 << 20)
for number in range(300):
    cuda.cuMemcpyHtoD(int(memory) + (number << 20), block, 1 << 20)
print("300 MiB taken")
"""


def show(message):
    content = message["content"]
    if message["msg_type"] == "stream":
        print(content["text"], end="", flush=True)
    elif message["msg_type"] == "error":
        print(content["ename"], content["evalue"], flush=True)


# The name by which Jupyter Server knows a kernel, which stays when it is started again.
place = Path(jupyter_runtime_dir())
place.mkdir(parents=True, exist_ok=True)
kernel = KernelManager(kernel_name="python3", connection_file=str(place / f"kernel-{uuid4()}.json"))
kernel.start_kernel()
client = kernel.blocking_client()
client.start_channels()
client.wait_for_ready(timeout=90)
client.execute_interactive(TAKE, output_hook=show, timeout=90)
while kernel.is_alive():
    with suppress(Empty):
        show(client.get_iopub_msg(timeout=0.5))
print("the kernel has ended", flush=True)
