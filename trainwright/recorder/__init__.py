"""The flight recorder of any loop: what it did, written down so that it can run again."""
