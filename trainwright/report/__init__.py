"""Formats findings and records as text and charts."""
