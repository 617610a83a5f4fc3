"""The built-in models: plain ``nn.Module`` classes, each with a factory of keyword options."""
