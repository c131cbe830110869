"""Kiwi's core: scheduler, protocol, pager, daemon and command line."""

from __future__ import annotations

__version__ = "0.1.0"
