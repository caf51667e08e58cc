"""The node "Kernel Benchmark"."""

import comfy.model_management
from comfy_api.latest import io

from ..kernels.benchmark import TICKS, text_of, title
from .attention.attention_kinds import AUTO as AUTO_ATTENTION
from .attention.attention_override import set_attention
from .benchmark.run import CLEAR, DECISIONS, STORE, forget, run, save_json
from .host.model_files import model_files, model_path
from .host.notices import show_load_warnings
from .loading.load import load_int8_model
from .loading.memory_choice import AUTO
from .pictures.plot import check_matplotlib, plot_times
from .sockets import RunsAlways, choice

NO_FILE = "none"


class INT8KernelBenchmark(RunsAlways):
    """Times the linears of a MODEL, or of Ideogram 4, in every format on this machine, and tells what INT8 is worth."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="INT8KernelBenchmark",
            display_name="Kernel Benchmark",
            category="model/quantization",
            search_aliases=["benchmark", "speed test", "faster", "3090", "rtx 30"],
            description="Times each linear of the connected model (Ideogram 4's without one) in bf16, FP8, GGUF, NF4 "
            "and INT8 on this card, says which form of a model to load here and what an image takes with it, and lets "
            "auto run what is fastest.",
            inputs=[
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="Its linears are timed, and one of its forwards. Ideogram 4's linears without a model.",
                ),
                io.Int.Input(
                    "tokens",
                    default=4352,
                    min=1,
                    max=1 << 20,
                    tooltip="Rows of the activations: image tokens + text tokens. 4352 is Ideogram 4 at 1024 px, 16640 "
                    "at 2048 px. A connected model's own are used where a forward of it can be measured.",
                ),
                *(
                    io.Boolean.Input(tick, default=True, optional=True, advanced=True, tooltip=tip)
                    for tick, tip in TICKS.items()
                ),
                choice(
                    "auto_decided",
                    DECISIONS,
                    "What decides on this card which linears 'auto' runs in INT8: this run, if the card is healthy; "
                    "what did so before; or only the card's name, which forgets the stored run and measures nothing.",
                ),
                choice(
                    "model_name",
                    [NO_FILE, *model_files()],
                    "A file in models/diffusion_models to measure where no model is connected. It is loaded as Load "
                    "INT8 DiT loads it.",
                ),
                io.Conditioning.Input(
                    "positive",
                    optional=True,
                    tooltip="A prompt for the measured forward of the model; random features of 256 tokens without it.",
                ),
                io.Latent.Input(
                    "latent_image",
                    optional=True,
                    tooltip="The size of the measured forward, such as an empty latent of 2048 px; 1024 px without it, "
                    "128 px on a CPU.",
                ),
            ],
            outputs=[
                io.Image.Output(tooltip="The times, drawn."),
                io.String.Output(display_name="table", tooltip="The same as a table."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls, tokens, model=None, auto_decided=STORE, model_name=NO_FILE, positive=None, latent_image=None, **ticks
    ) -> io.NodeOutput:
        show_load_warnings()
        check_matplotlib()  # before the work, and not after it
        if auto_decided == CLEAR:
            device = comfy.model_management.get_torch_device() if model is None else model.load_device
            sections = [{"title": forget(device), "columns": [], "rows": [], "notes": []}]
            picture = plot_times([], sections[0]["title"], "")
            return io.NodeOutput(picture, text_of(sections), ui={"int8_benchmark": sections})
        if model is None and model_name != NO_FILE:
            model = load_int8_model(model_path(model_name), "auto", memory=AUTO)
            set_attention(model, AUTO_ATTENTION)  # as a new Load INT8 DiT has it
        ticked = [tick for tick in TICKS if ticks.get(tick, True)]
        outcome = run(model, tokens, ticked, positive, latent_image, auto_decided)
        file = save_json(outcome)
        sections = outcome.sections(file)
        picture = plot_times(outcome.linears, outcome.headline, title(outcome.machine), outcome.attention)
        return io.NodeOutput(picture, text_of(sections), ui={"int8_benchmark": sections})
