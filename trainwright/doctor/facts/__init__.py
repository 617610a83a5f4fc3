"""Results of the instruments: frozen dataclasses, one module for each topic, without torch."""
