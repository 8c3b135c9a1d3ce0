"""vLLM as the inference engine: stepped in this process, weights written in place between two steps."""

from headway.generate.vllm.engine import VLLMEngine
from headway.generate.vllm.start import open_vllm

__all__ = ["VLLMEngine", "open_vllm"]
