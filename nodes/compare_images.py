"""The node "Compare Images"."""

import torch
from comfy_api.latest import io, ui

from ..kernels.benchmark import markdown
from .host.work import Progress
from .pictures.comparison import compare_images, comparison_table, difference, paired_images


class CompareImagesINT8DiT(io.ComfyNode):
    """IMAGEs and their references -> PSNR and SSIM with their uncertainty, and what differs as pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CompareImagesINT8DiT",
            display_name="Compare Images (PSNR, SSIM)",
            category="image",
            search_aliases=[
                "compare",
                "psnr",
                "ssim",
                "image quality",
                "image difference",
                "fidelity",
                "image metrics",
            ],
            description=(
                "Measures how close images are to reference images of the same seeds, such as INT8 to bf16: PSNR and "
                "SSIM of each pair, their mean and its 95 % interval. With a second set of images it says which of the "
                "two is closer, or that the difference is within noise."
            ),
            inputs=[
                io.Image.Input("reference", tooltip="What the others should look like: one image, or one for each."),
                io.Image.Input("image", tooltip="Images of the same seeds in the same order, such as those in INT8."),
                io.Image.Input("other", optional=True, tooltip="A second candidate for the same reference."),
                io.Float.Input(
                    "amplification",
                    default=10.0,
                    min=1.0,
                    max=255.0,
                    step=1.0,
                    round=0.1,
                    optional=True,
                    advanced=True,
                    tooltip="What the difference is multiplied by, so that it can be seen.",
                ),
            ],
            outputs=[
                io.Image.Output(
                    display_name="difference",
                    is_output_list=True,
                    tooltip="The absolute difference from the reference, amplified: the pictures of image, then those "
                    "of other.",
                ),
                io.String.Output(display_name="table", tooltip="PSNR and SSIM as text."),
            ],
            is_input_list=True,  # lists are one comparison too, not one comparison for each item
            is_output_node=True,
        )

    @classmethod
    def execute(cls, reference, image, other=None, amplification=(10.0,)) -> io.NodeOutput:
        batches = {"image": image} if other is None else {"image": image, "other": other}
        references, candidates = paired_images(reference, **batches)
        progress = Progress(len(references) * len(batches))
        results, differences = {}, []
        for name, images in candidates.items():
            results[name] = []
            pictures = [batch.new_empty(batch.shape) for batch in batches[name]]
            places = [place for batch in pictures for place in batch]
            for expected, shown, place in zip(references, images, places, strict=True):
                results[name].append(compare_images(expected, shown, name))
                place.copy_(difference(expected, shown, amplification[0]))
                progress.step()
            differences += pictures
        table = comparison_table(results)
        worst = min(range(len(references)), key=lambda place: results["image"][place].psnr)
        # The node's details lay the two over each other.
        pair = torch.stack([references[worst].cpu(), candidates["image"][worst].cpu()])
        pair = pair.expand(*pair.shape[:-1], max(3, pair.shape[-1]))  # PreviewImage writes none of one channel
        details = {"number": worst + 1, "files": ui.PreviewImage(pair).as_dict()["images"]}
        text = "\n\n".join([table["title"], markdown(table["columns"], table["rows"]), *table["notes"]])
        return io.NodeOutput(differences, text, ui={"int8_benchmark": [table], "int8_image_pair": [details]})
