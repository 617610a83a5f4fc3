"""`verify`: proof on one's own files that checkpoints are whole and that a resumed run has the same bits."""
