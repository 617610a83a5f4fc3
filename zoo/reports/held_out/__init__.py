"""Cases that are measured once; no check is changed because of them."""
