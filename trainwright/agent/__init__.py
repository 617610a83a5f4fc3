"""Serves diagnoses, evidence and replays of runs to coding agents over the Model Context Protocol."""
