"""The models that ship in the box: plain ``nn.Module`` classes, each with a factory of keyword options."""
