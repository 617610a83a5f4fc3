"""The flight recorder of any loop: records its steps as programs that can be replayed."""
