"""The optimizer step and the loop around it. This package does not depend on recipes or plans."""
