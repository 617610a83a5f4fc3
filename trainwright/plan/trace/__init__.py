"""What a run of a recipe would hold and how long a step would take, found by tracing one step under fake tensors.

Read it in this order: recipe -> blueprint -> traced step -> layouts -> forecast.

blueprint              the model, loss, optimizer and micro-batch that a recipe names
traced_step            our engine's own step under fake tensors; returns a ``plan.trace.Trace``
layouts                the layouts of a recipe, each as two traces from which every micro-batch size follows
run_forecast           the best layout for a device, the recipe as it stands, and what would make it fit
resolve                what a recipe leaves open, decided before a run is built
checkpointing_planner  which activations each block keeps, for a budget in bytes; from ``block_profile``
local_device           the local CPU or GPU, described like a row of the device table

Under the traced step lie ``tracker`` (which storages live when), ``moments`` and ``caching_allocator`` (bytes over
time), ``work`` (FLOPs and bytes moved), ``data_dependent`` and ``hidden_memory`` with ``kernel_memory`` (what fake
tensors cannot answer or show), ``fake_tensors``, ``simulated_cuda`` and ``simulated_lstm`` (the device), and
``operator_call``. ``graph_profiler`` reads the autograd graph for ``trainwright graph``.
"""
