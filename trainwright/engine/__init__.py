"""The heart: what one optimizer step is, and the loop around it. Knows no recipe and no plan."""
