"""A recorded step is run again, any way one likes; then everything is put back."""
