"""What all parts of benchmarks/real_model.py measure on."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Setting:
    """A model's folder, and the Pythons of its peers."""

    model: str
    vllm: str
    trl: str

    def prompts(self, count: int) -> list[list[int]]:
        """Return the token ids of so many different questions, in the model's chat format."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.model)
        return [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": f"What is {number} + {7 * number % 90}? Explain briefly."}],
                add_generation_prompt=True,
                return_dict=False,
            )
            for number in range(count)
        ]
