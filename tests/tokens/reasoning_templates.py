"""Small chat templates with the features of those that models of 2026 have: what opens, closes or leaves out reasoning,
by which argument, and where. Each is written here; none is a published one."""

MESSAGES = "{%- for m in messages %}"
END = "{%- endfor %}"
LAST_USER = ("{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
             "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}")
TOOLS = "{%- if tools %}{{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"
CALLS = ("{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + c.function.name + ' ' + (c.function.arguments | tojson)"
         " + '</tool_call>' }}{%- endfor %}")
OFF = "enable_thinking is defined and enable_thinking is false"
ON = "enable_thinking is defined and enable_thinking"


def chatml(answer, prompt, *, before="", content="m.content", thought="m.reasoning_content"):
    "ChatML whose answers begin with `answer`, and whose prompts end with `prompt`"
    return (LAST_USER + TOOLS + before + MESSAGES + "{%- if m.role == 'assistant' %}"
            "{%- set content = " + content + " %}{%- set thought = " + thought + " %}"
            "{{- '<|im_start|>assistant\\n' }}" + answer + "{{- content }}" + CALLS + "{{- '<|im_end|>\\n' }}"
            "{%- else %}"
            "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}" + END +
            "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}" + prompt + "{%- endif %}")


PARSES = ("{%- if not thought and '</think>' in content %}"
          "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
          "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}")
BLOCK = "{{- '<think>\\n' + (thought or '') + '\\n</think>\\n\\n' }}"
EMPTY = "{{- '<think>\\n\\n</think>\\n\\n' }}"
OPEN = "{{- '<think>\\n' }}"
IN_LAST = "{%- if loop.index0 > ns.last %}" + BLOCK + "{%- endif %}"
IF_THOUGHT = "{%- if thought %}" + BLOCK + "{%- endif %}"


def when(condition, then, otherwise=""): return f"{{%- if {condition} %}}{then}{{%- else %}}{otherwise}{{%- endif %}}"


def deepseek(answer, prompt):
    "Turns without role headers but the answer's"
    return ("{{- '' }}" + MESSAGES + "{%- if m.role in ('user', 'tool') %}{{- '<|User|>' + m.content }}"
            "{%- elif m.role == 'system' %}{{- m.content }}{%- else %}{%- set thought = m.reasoning_content %}"
            "{%- set content = m.content %}{{- '<|Assistant|>' }}" + answer
            + "{{- content + '<|im_end|>' }}{%- endif %}" + END
            + "{%- if add_generation_prompt %}{{- '<|Assistant|>' }}" + prompt + "{%- endif %}")


HARMONY = (MESSAGES + "{%- if m.role == 'assistant' %}"
           "{%- if '<|channel|>' in m.content %}{{- raise_exception('<|channel|> tags in content') }}{%- endif %}"
           "{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
           "{%- endif %}"
           "{%- if m.tool_calls %}{%- for c in m.tool_calls %}{{- '<|start|>assistant to=functions.' + c.function.name"
           " + '<|channel|>commentary json<|message|>' + (c.function.arguments | tojson) + '<|call|>' }}{%- endfor %}"
           "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + "
           "('<|return|>' if loop.last else '<|end|>') }}{%- endif %}"
           "{%- elif m.role == 'tool' %}"
           "{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}"
           "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + (tools | tojson if tools and loop.first else '')"
           " + m.content + '<|end|>' }}{%- endif %}" + END
           + "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}")
DATED = ("{{- '<|im_start|>system\\nToday Date: ' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}")

TEMPLATES = dict(
    qwen3=chatml(PARSES + IN_LAST, when(OFF, EMPTY)),
    qwen3_2507_thinking=chatml(PARSES + IN_LAST, OPEN),
    qwen3_5_thinking=chatml(PARSES + IN_LAST, when(OFF, EMPTY, OPEN)),
    qwen3_5_nothink=chatml(PARSES + IN_LAST, when(ON, OPEN, EMPTY)),
    deepseek_r1=deepseek("{%- set content = content.split('</think>')[-1] %}", OPEN),
    deepseek_v3_1=deepseek("{%- set content = content.split('</think>')[-1] %}{{- '</think>' }}",
                           when("thinking is defined and thinking", "{{- '<think>' }}", "{{- '</think>' }}")),
    deepseek_v4=chatml(when(ON, when("thought", BLOCK, EMPTY)), when(ON, OPEN)),
    exaone_4=chatml(when(ON, IN_LAST, IN_LAST), when(ON, OPEN, EMPTY)),
    hy3=chatml(when(ON, BLOCK, EMPTY), when(ON, OPEN, EMPTY)),
    minicpm5=chatml(PARSES + BLOCK, when(ON, OPEN, EMPTY)),
    laguna_xs=chatml(IF_THOUGHT, when(ON, OPEN, EMPTY)),
    laguna_s=chatml(when(ON, IF_THOUGHT), when(ON, OPEN)),
    smollm3=chatml(PARSES + when(OFF, EMPTY, IF_THOUGHT), when(OFF, EMPTY), before=DATED),
    granite=chatml("", "", before=when("thinking is defined and thinking",
                                       "{{- '<|im_start|>system\\nThink first.<|im_end|>\\n' }}")),
    magistral=chatml(when("thought", "{{- '[THINK]' + thought + '[/THINK]' }}"), ""),
    gpt_oss=HARMONY,
    gemma_3=(MESSAGES + "{%- if m.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
             "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Roles must alternate') }}"
             "{%- endif %}{{- '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
             "{{- m.content + '<|im_end|>\\n' }}"
             + END + "{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{%- endif %}"),
    gemma_4=chatml(when("thought", "{{- '<|channel>thought\\n' + thought + '\\n<channel|>' }}"),
                   when(ON, "", "{{- '<|channel>thought\\n<channel|>' }}")),
    llama_3_1=chatml("", "", before=DATED),
    glm_4_5=chatml(PARSES + when("loop.index0 > ns.last and thought", "{{- '<think>' + thought + '</think>\\n' }}",
                                 "{{- '<think></think>\\n' }}"), when(OFF, "{{- '<think></think>\\n' }}")),
    hunyuan=chatml(when(OFF, EMPTY, IF_THOUGHT), when(OFF, EMPTY)),
    phi_4_reasoning=chatml("", "", before="{{- '<|im_start|>system\\nThink in <think> tags.<|im_end|>\\n' }}"),
    nemotron=chatml(PARSES + when("thought", BLOCK, "{{- '<think></think>' }}"),
                    when(OFF, "{{- '<think></think>' }}", OPEN)),
    minimax_m3=chatml(IF_THOUGHT, OPEN).replace(
        "(c.function.arguments | tojson)", "('{' + (c.function.arguments.items() | selectattr(1, 'ne', none)"
        " | map('first') | join(' ')) + '}' + (c.function.arguments.values() | select('ne', none) | join(' ')))"),
    kimi=chatml(when("loop.index0 > ns.last", "{{- '◁think▷' + (thought or '') + '◁/think▷' }}"), ""),
    command_a=chatml(when("thought", "{{- '<|START_THINKING|>' + thought + '<|END_THINKING|>' }}", ""),
                     when(OFF, "{{- '<|START_THINKING|><|END_THINKING|>' }}")))
SPECIAL = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|User|>", "<|Assistant|>",
           "<|START_THINKING|>", "<|END_THINKING|>", "[THINK]", "[/THINK]"]
