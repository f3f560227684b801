"""The modules of the package from top to bottom: a module imports only from modules before it."""

# The first ones import no torch.
TORCH_FREE = (
    "checks", "folders", "config", "costs", "hardware", "card", "blocks", "request", "scheduler",
    "timeline", "virtual_time", "metrics", "fragmentation",
)  # fmt: skip
ORDER = (
    *TORCH_FREE, "measure", "devices", "chat_template", "tokenizer", "kernels", "kernels.tiles",
    "kernels.flash_forward", "kernels.flash_backward", "kernels.flash_decode",
    "kernels.paged_attention", "kernels.fused", "kernels.few_rows", "flash",
    "attention", "cache", "per_token", "model", "kv_cache", "grid", "quantized_kv",
    "calibration", "gptq", "awq", "quantized_linear", "w8a8", "quantize", "sparsity",
    "weights.files", "weights.build", "weights.safetensors_folder",
    "weights.gguf_header", "weights.gguf_checkpoint", "weights.tokenizer_files",
    "weights.default", "weights", "training", "student", "evaluate", "gqa", "prepack", "sampling",
    "ragged", "paged", "cuda_graphs", "generate", "drafters", "medusa", "speculative",
    "proposals", "steps", "engine_config", "engine", "parallel", "parallel.plan",
    "parallel.step_time", "parallel.collectives", "parallel.tensor", "parallel.pipeline",
    "parallel.loading", "parallel.serving", "parallel.with_pytorch", "parallel.__main__",
    "teacher_text", "distill", "workload", "plots", "exercises",
    "bench", "bench.recording", "bench.models", "bench.peers", "bench.decode",
    "bench.prefill", "bench.attention", "bench.serve_gpu", "bench.serve", "bench.load",
    "bench.quantize", "bench.speculate", "bench.gpu", "bench.gpu_kernels", "bench.gpu_model",
    "bench.gpu_second", "bench.tables", "bench.command", "__main__", "bench.__main__",
)  # fmt: skip
