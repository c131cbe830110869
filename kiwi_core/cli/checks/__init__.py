"""The checks of ``kiwi doctor``: one module per area, with a function that yields findings.

A check raises nothing for what it finds and changes nothing on the machine.
"""
