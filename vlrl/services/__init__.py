"""Services of a run: models beside the policy that rewards ask. A task knows their protocols alone (task/services.py).

    chat        one request to an OpenAI-compatible server, asked again where that may help
    replies     what was answered, kept by content in the run folder
    judge       `services.judge`
    clip        `services.clip`
    reward_model    `services.reward_model`
    *_parts     reward parts of `task.parts` that ask one of them, or the policy
    provided    those that a run has, and what a group is given of them
    absent      parts of a task that need one which is not there
"""
