"""The work of each verb of the command line."""
