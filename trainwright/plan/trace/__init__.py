"""Predicts the memory and step time of a recipe by tracing one step under fake tensors.

Read it in this order: recipe -> blueprint -> traced step -> layouts -> forecast.

blueprint              the model, loss, optimizer and micro-batch that a recipe names
traced_step            the Trainwright engine's step under fake tensors; returns a ``plan.call_trace.Trace``
layouts                the layouts of a recipe, each as two traces from which every micro-batch size is extrapolated
run_forecast           the best layout for a device, the recipe as written, and remedies that make it fit
resolve                decisions that a recipe leaves open, made before a run is built
many_ranks             the layouts of a recipe on several ranks
finetuning             full fine-tuning, LoRA and QLoRA compared
checkpointing_planner  chooses the activations that each block keeps within a budget in bytes
local_device           the local CPU or GPU, described like a row of the device table

The traced step uses ``tracker`` (lifetimes of storages), ``operator_call`` (FLOPs and bytes moved), ``hidden_memory``
(memory that fake tensors do not show), and ``fake_tensors``, ``simulated_cuda`` and ``simulated_lstm`` (the device).
``graph_profiler`` reads the autograd graph for ``trainwright graph``.
"""
