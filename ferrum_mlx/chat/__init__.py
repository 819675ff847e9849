"""What a chat is, without a screen: the conversation and its branches, where it is kept, its commands."""
