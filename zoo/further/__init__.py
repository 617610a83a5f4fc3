"""Five further healthy programs, written after the laws and by somebody else; in all else like those of zoo/hosts."""
