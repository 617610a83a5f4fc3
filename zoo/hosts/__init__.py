"""Ten healthy programs, as people write them, for mutants to be made of; and what judges them."""
