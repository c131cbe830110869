# Run after notebook.py, in the same kernel.
found, wrong = bytearray(BLOCK), 0  # noqa: F821
for number in range(MIB):  # noqa: F821
    check(cuda.cuMemcpyDtoH(found, memory + number * BLOCK, BLOCK))  # noqa: F821
    wrong += found != block  # noqa: F821
print("wrong blocks after idling:", wrong)
