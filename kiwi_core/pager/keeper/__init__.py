"""A keeper: one small process beside a program whose GPU memory is moved by *custom storage*.

The driver hands it the program's memory, and it copies that to RAM of its own and back, and hashes
it, to copy only what has changed. It is nobody's child: daemon and supervisor may be killed at any
moment, what is out stays with the keeper, and what is moving is moved to its end. It ends with the
program.

**Unproven**: written from NVIDIA's documentation and tested on the emulated driver only; ADR 25
says what is assumed.

``python -m kiwi_core.pager.keeper OPTIONS`` is started by ``kiwi_core.pager.keepers``.
"""
