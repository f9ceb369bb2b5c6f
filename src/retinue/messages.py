"""Messages of a conversation, their parts, and the tool calls they ask for."""

# fmt: off
from .core.messages import (
    DataPart,
    FilePart,
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    ReceiptPart,
    Role,
    TextPart,
    ToolCall,
    Visibility,
)

__all__ = [
    "DataPart", "FilePart", "ImagePart", "Message", "Part", "ReasoningPart", "ReceiptPart", "Role", "TextPart",
    "ToolCall", "Visibility",
]
