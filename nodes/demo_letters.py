"""The node "Demo Letters"."""

from comfy_api.latest import io

from .demo.letters import LettersDecoder, conditioning, empty_latent


class DemoLettersINT8DiT(io.ComfyNode):
    """Text -> what the pack's demo model samples it with, in the place of a text encoder and a VAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DemoLettersINT8DiT",
            display_name="Demo Letters",
            category="model/quantization",
            search_aliases=["int8 demo", "example", "try int8"],
            description=(
                "A prompt for the demo model that comes with this pack (demo_letters_q4_0.gguf in Load INT8 DiT): it "
                "draws letters on any machine, with nothing to download."
            ),
            inputs=[
                io.String.Input("text", default="INT8", tooltip="What to draw: up to 16 letters A-Z and digits."),
            ],
            outputs=[
                io.Conditioning.Output(tooltip="The text, for a sampler."),
                io.Latent.Output(tooltip="An empty latent for each letter."),
                io.Vae.Output(tooltip="For VAE Decode: the letters beside each other, as one picture."),
            ],
        )

    @classmethod
    def execute(cls, text) -> io.NodeOutput:
        positive = conditioning(text)
        return io.NodeOutput(positive, empty_latent(positive), LettersDecoder())
