"""What the instruments measure: frozen dataclasses, one module for each topic, without torch."""
