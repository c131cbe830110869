"""Handlers of what clients and libraries ask for, and of sessions that join, leave, or recover."""
