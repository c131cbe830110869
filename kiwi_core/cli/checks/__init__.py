"""What ``kiwi doctor`` looks at: one module per area, each a function that yields findings.

A check never raises for what it finds and changes nothing on the machine.
"""
