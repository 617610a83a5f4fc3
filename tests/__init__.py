"""The tests mirror the rooms of the house; modules beside them that hold no tests are shared by several."""
