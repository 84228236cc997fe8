"""Services of a run: models beside the policy that rewards ask. A task knows their protocols alone (task/services.py).

    chat        one request to an OpenAI-compatible server, asked again where that may help
    replies     what was answered, kept by content in the run folder
    judge       `services.judge`
    clip        `services.clip`
    reward_model    `services.reward_model`
    *_parts     reward parts of `task.parts` that ask one of them, or the policy

Which of them a run has stands in rollout/provided.py.
"""
