"""Services of a run: models beside the policy that rewards ask. A task knows their protocols alone (task/services.py).

    chat        one request to an OpenAI-compatible server, asked again where that may help
    replies     what was answered, kept by content in the run folder
    judge       `services.judge`
    clip        `services.clip`
    reward_model    `services.reward_model`
    provided    which services a run has, what they cost, and what a group is given of them
"""
