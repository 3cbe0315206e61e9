"""Serve many LoRA adapters on one Mixture-of-Experts model at once, expert weights included."""

TYPE_CHECKING = False  # typing's own takes 5 ms, in which a Ctrl-C would leave a traceback

__version__ = "0.1.0.dev0"

__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]

if TYPE_CHECKING:
    from vexpert.engine.llm import LLM as LLM
    from vexpert.engine.sampling_params import SamplingParams as SamplingParams
    from vexpert.engine.structured_outputs import StructuredOutputs as StructuredOutputs


def __getattr__(name: str) -> object:
    # Imported on first use, so that `import vexpert` and the command line start without torch.
    if name == "LLM":
        from vexpert.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from vexpert.engine.sampling_params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from vexpert.engine.structured_outputs import StructuredOutputs

        return StructuredOutputs
    raise AttributeError(f"module 'vexpert' has no attribute {name!r}")
