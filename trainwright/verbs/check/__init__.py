"""Would this recipe train? Each verdict is a small function over live parts; what is trained here is thrown away."""
