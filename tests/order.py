"""The rooms of the package from top to bottom: a file imports only from files before it.

A room stands here as a whole, with its insides in their own order. So no room imports from one
below it, and no two rooms import from each other.
"""

ROOMS: tuple[str | tuple[str, tuple[str, ...]], ...] = (
    (
        "tools",
        (
            "checks", "command_line", "folders", "exercises", "submissions", "chat_template",
            "devices", "markdown", "plots",
        ),
    ),
    (
        "kernels",
        (
            "availability", "tuning", "tiles", "online_softmax", "flash_forward", "flash_backward",
            "flash_decode", "paged_attention", "fused", "few_rows",
        ),
    ),
    "cpu_products", "measure", "config", "hf_config", "hardware", "costs", "card",
    "vocabulary", "tokenizer", "sampling",
    ("layers", ("flash", "attention", "per_token", "fast")),
    "blocks", "pieces", "fragmentation",
    "cache", "model", "kv_cache", "ragged", "paged", "generation",
    "training", "evaluate", "gqa", "prepacked",
    (
        "quantization",
        (
            "grid", "kv_cache", "calibration", "gptq", "awq", "linear", "w8a8", "quantize",
            "sparsity",
        ),
    ),
    (
        "weights",
        (
            "files", "build", "safetensors_folder", "gguf_header", "gguf_config", "gguf_checkpoint",
            "special_tokens", "tokenizer_files", "default", "loading",
        ),
    ),
    ("speculation", ("formulas", "drafters", "medusa", "medusa_heads", "speculative")),
    (
        "serving",
        (
            "request", "step_plan", "scheduler", "timeline", "metrics", "virtual_time",
            "engine_config", "batch_drafters", "proposals", "cuda_graphs", "model_runner",
            "recovery", "engine", "workload", "prometheus", "answer_text", "engine_thread",
            "fields", "protocol", "replies", "http_server", "graceful",
        ),
    ),
    (
        "parallel",
        (
            "plan", "step_time", "ranks", "collectives", "tensor", "pipeline", "loading",
            "serving", "with_pytorch", "__main__",
        ),
    ),
    ("distillation", ("student", "teacher_text", "distill", "__main__")),
    (
        "bench",
        (
            "recording", "models", "peers", "decode", "prefill", "attention", "serve_gpu", "serve",
            "serve_http", "clients", "load", "quantize", "quality", "distill", "speculate", "gpu",
            "gpu_tests", "gpu_kernels", "gpu_decode", "gpu_model", "gpu_lessons", "gpu_second",
            "tables", "command", "__main__",
        ),
    ),
    ("mine", ("source", "checks", "parts", "kept", "ours")),
    "serve", "__main__",
)  # fmt: skip

ORDER = tuple(
    name
    for place in ROOMS
    for name in (
        (place,) if isinstance(place, str) else (place[0], *(f"{place[0]}.{f}" for f in place[1]))
    )
)
"""Every module; a room's own name, its `__init__`, stands before its insides."""

TORCH_FREE = (
    "tools.checks", "tools.command_line", "tools.folders", "tools.exercises", "tools.submissions",
    "tools.chat_template", "tools.markdown", "config", "hf_config", "hardware", "costs", "card",
    "blocks", "pieces", "fragmentation", "speculation.formulas", "serving.request",
    "serving.step_plan", "serving.scheduler", "serving.timeline", "serving.metrics",
    "serving.virtual_time", "serving.engine_config", "serving.workload", "parallel.plan",
    "parallel.step_time",
)  # fmt: skip
"""What counts, decides or plans imports neither torch nor NumPy."""
