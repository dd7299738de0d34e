"""Images and sound in requests to the server and in `tutti generate`."""

from __future__ import annotations

import base64
import io
import math
import struct
import wave
from pathlib import Path

import openai
import pytest
import tiny
import torch
import transformers as t
import web
from PIL import Image

import encoder_models as encoders
from tutti.serve import Engine, Request, Sampling, command, media
from tutti.serve.server.app import Options

COUNT = 8


def picture(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((20, 24)).point(lambda x: (x + shade) % 256).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def url_of(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def speech(seconds: float = 1.0, rate: int = 16000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        samples = [int(9000 * math.sin(0.2 * i) * math.sin(0.001 * i)) for i in range(int(seconds * rate))]
        file.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return buffer.getvalue()


def tokenizer(**marks: str) -> t.PreTrainedTokenizerFast:
    """That of the other tests, with bytes as tokens."""
    return t.PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer()._tokenizer, eos_token="</s>", **marks)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    """A folder with a model of images and its processor."""
    folder = tmp_path_factory.mktemp("llava")
    image = t.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    words = tokenizer()
    mark = words.convert_ids_to_tokens(9)
    template = (
        "{% for m in messages %}{{ m.role }}: {% for x in m.content %}"
        "{% if x.type == 'image' %}" + mark + "{% else %}{{ x.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    processor = t.LlavaProcessor(image, words, patch_size=8, vision_feature_select_strategy="default",
                                 image_token=mark, num_additional_image_tokens=1, chat_template=template)  # fmt: skip
    processor.save_pretrained(folder)
    encoders.llava().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hearing(tmp_path_factory) -> Path:
    """A folder with a model of speech and its processor."""
    folder = tmp_path_factory.mktemp("whisper")
    extractor = t.WhisperFeatureExtractor(feature_size=16, chunk_length=2, n_fft=400)
    t.WhisperProcessor(extractor, tokenizer()).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {**encoders.SMALL, "vocab_size": 260, "eos_token_id": 256}
    config = t.WhisperConfig(**sizes, num_mel_bins=16, max_source_positions=100, max_target_positions=60)
    t.WhisperForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server_that_sees(seeing):
    server = web.Running(engine(seeing), Options("m"))
    yield server
    server.stop()


def engine(folder: Path) -> Engine:
    return Engine(folder, plan="single", blocks=64, budget=64, most=4)


def chat(running: web.Running, *images: bytes) -> openai.types.chat.ChatCompletion:
    parts = [{"type": "image_url", "image_url": {"url": url_of(x)}} for x in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
    return running.client().chat.completions.create(model="m", messages=messages, max_tokens=COUNT, temperature=0)


@pytest.mark.parametrize("shades", [(0,), (90,), (0, 90)])
def test_images_in_a_chat(server_that_sees, seeing, shades):
    processor, model = t.AutoProcessor.from_pretrained(seeing), encoders.llava()
    images = [picture(x) for x in shades]
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": "what?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=text, images=media.images(images), return_tensors="pt")
    wanted = model.generate(**inputs, do_sample=False, max_new_tokens=COUNT)[0, inputs["input_ids"].shape[1] :]
    completion = chat(server_that_sees, *images)
    assert completion.choices[0].message.content == processor.decode(wanted, skip_special_tokens=True)
    assert completion.usage.prompt_tokens == inputs["input_ids"].shape[1]


@pytest.mark.parametrize("url, message", [
    ("http://127.0.0.1/a.png", "data:image"), ("data:image/png;base64,AA", "image"),
    ("data:image/png;base64,?", "base64"),
])  # fmt: skip
def test_wrong_images(server_that_sees, url, message):
    content = [{"type": "image_url", "image_url": {"url": url}}]
    response = server_that_sees.post("/v1/chat/completions", model="m", messages=[{"role": "user", "content": content}])
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_images_that_are_bombs_or_programs(server_that_sees):
    bomb = io.BytesIO()
    Image.new("1", (8192, 8192)).save(bomb, "PNG")
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    for images in ([bomb.getvalue()] * 3, [picture(0)] * 100, [program]):
        with pytest.raises(openai.BadRequestError, match="image"):
            chat(server_that_sees, *images)


def test_constraints_of_a_model_with_a_processor(server_that_sees):
    (output,) = server_that_sees.engine.generate(["a"], Sampling(max_tokens=9, regex="[ab]{3}", seed=0))
    assert len(output.text) == 3 and set(output.text) <= set("ab")


def test_transcriptions(hearing):
    running = web.Running(engine(hearing), Options("m"))
    try:
        response = running.post("/v1/chat/completions", model="m", messages=[{"role": "user", "content": "a"}])
        assert response.status_code == 400 and "template" in response.json()["error"]["message"]
        client, wav = running.client(), speech()
        heard = client.audio.transcriptions.create(model="m", file=("a.wav", wav), temperature=0)
        prompt, inputs = media.heard(running.engine.processor, *media.sound(wav))
        (output,) = engine(hearing).generate([Request(prompt, Sampling(temperature=0), inputs=inputs)])
        assert heard.text == output.text.strip() and output.tokens
        for file, message in ((b"RIFF", "WAV"), (speech(rate=8000), "8000"), (speech(3.0), "3.0 s")):
            with pytest.raises(openai.BadRequestError, match=message):
                client.audio.transcriptions.create(model="m", file=("a.wav", file))
    finally:
        running.stop()


def test_generate_of_files(seeing, hearing, tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(picture(0))
    (tmp_path / "a.wav").write_bytes(speech())
    command.generate(str(seeing), "what?", (tmp_path / "a.png",), tokens=COUNT, temperature=0, plan="single")
    assert capsys.readouterr().out.startswith("what?")
    command.generate(str(hearing), "", sound=tmp_path / "a.wav", tokens=COUNT, temperature=0, plan="single")
    assert capsys.readouterr().out.strip()
