"""Serves runs to coding agents over the Model Context Protocol: verdicts, evidence and experiments."""
