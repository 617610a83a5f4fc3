"""Training faults from public reports, each a small PyTorch program with a repaired twin, and healthy unusual programs.

``python -m zoo.reports --watch null --twins`` checks that each fault shows its symptom and that no twin does.
``python -m zoo.reports --watch trainwright --twins`` scores the findings of ``tw.watch``.

The cases are in two halves. The list of reports was shuffled with a fixed seed and split before any program was
written. Work on checks may use ``open/``. ``held_out/`` is run once, at the end of a piece of work, and no check may be
changed because of its results.

To add a case, write a function in a module of ``open/`` or ``held_out/``, and decorate it with `fault` or `healthy` of
``zoo.reports.case``. It trains as the reported program does, with ``with watch(model, optimizer, ...):`` around the
loop, and returns an `Outcome`. A fault also takes ``faulty``: False runs the repaired twin.
"""
