"""The norms of other libraries, known by the identity of their classes; their output in 16 bits."""

from __future__ import annotations

import torch
from torch import nn

from .._local_gradients import LOW_PRECISION
from .imported import imported_class

# transformers.models.NAME.modeling_NAME as NAME/Class, or NAME/FILE/Class where the file has
# another name: the modules of transformers that derive from nn.Module alone and own nothing
# but the weights of a norm, as buffers if they are frozen. (Those that derive from torch's norms
# need no entry.) In the first list the end of each name, RMSNorm, is left out.
_RMS_NORMS = """
afmoe/Afmoe aimv2/Aimv2 apertus/Apertus arcee/Arcee aria/AriaText axk1/AXK1 axk2/AXK2
bailing_hybrid/BailingHybrid bamba/Bamba beam/Beam bitnet/BitNet blt/Blt chameleon/Chameleon
clvp/Clvp cohere2_moe/Cohere2Moe cosmos3_edge/Cosmos3EdgeText csm/Csm cwm/Cwm
deepseek_ocr2/DeepseekOcr2Vision deepseek_ocr2/DeepseekOcr2Text deepseek_v2/DeepseekV2
deepseek_v3/DeepseekV3 deepseek_v32/DeepseekV32 deepseek_v4/DeepseekV4 deimv2/Deimv2 dia/Dia
diffllama/DiffLlama diffusion_gemma/DiffusionGemma doge/Doge dots1/Dots1 dots3_note/Dots3Note
embedding_gemma2/EmbeddingGemma2 emu3/Emu3 ernie4_5/Ernie4_5 ernie4_5_moe/Ernie4_5_Moe
ernie4_5_vl_moe/Ernie4_5_VLMoe eurobert/EuroBert evolla/Evolla exaone4/Exaone4 exaone4_5/Exaone4_5_
exaone_moe/ExaoneMoe falcon_h1/FalconH1 falcon_mamba/FalconMamba flex_olmo/FlexOlmo flint/Flint
gemma/Gemma gemma2/Gemma2 gemma3/Gemma3 gemma3n/Gemma3n gemma4/Gemma4 gemma4_unified/Gemma4Unified
glm/Glm glm4/Glm4 glm4_moe/Glm4Moe glm4_moe_lite/Glm4MoeLite glm4v/Glm4v glm4v_moe/Glm4vMoeText
glm4v_moe/Glm4vMoe glm5_next/Glm5NextText glm5_next/Glm5Next glm_image/GlmImage
glm_moe_dsa/GlmMoeDsa glm_ocr/GlmOcr gpt_oss/GptOss granite/Granite
granite4_vision/Granite4VisionText granite_docling/GraniteDoclingText granite_swa/GraniteSWA
granitemoe/GraniteMoe granitemoe_swa/GraniteMoeSWA granitemoehybrid/GraniteMoeHybrid
granitemoeshared/GraniteMoeShared helium/Helium higgs_audio_v2/HiggsAudioV2
hunyuan_v1_dense/HunYuanDenseV1 hunyuan_v1_moe/HunYuanMoEV1 hunyuan_vl/HunYuanVL hy_v3/HYV3
hy_v4/HYV4 hyperclovax/HyperCLOVAX idefics/Idefics idefics2/Idefics2 idefics3/Idefics3
inkling/Inkling inkling2/Inkling2 internvl/InternVLVision jamba/Jamba jetmoe/JetMoe
kimi_linear/KimiLinear kolibri1/Kolibri1 kyutai_speech_to_text/KyutaiSpeechToText laguna/Laguna
lfm2/Lfm2 lfm2_moe/Lfm2Moe lfm3/Lfm3 lfm3_vl/Lfm3VlVision lighton_ocr/LightOnOcr llama/Llama
llama4/Llama4Text longcat_flash/LongcatFlash mamba/Mamba mamba2/Mamba2 mellum/Mellum
mimo_v2_flash/MiMoV2Flash minicpm3/MiniCPM3 minimax/MiniMax minimax_m2/MiniMaxM2
minimax_m3_vl/MiniMaxM3VL ministral/Ministral ministral3/Ministral3 mistral/Mistral
mistral3/Mistral3 mistral4/Mistral4 mistral_large4/MistralLarge4 mixtral/Mixtral mllama/MllamaText
molmo2/Molmo2 moshi/Moshi muse_glimmer/MuseGlimmer muse_glimmer/MuseGlimmerTextCentered
muse_glimmer_assistant/MuseGlimmerAssistant muse_spark/MuseSpark muse_spark/MuseSparkTextCentered
muse_spark/MuseSparkTextInputScaled nemotron_h/NemotronH nemotron_h_omni/NemotronH_Omni_
neomme/NeoMME neucodec/NeuCodec olmo2/Olmo2 olmo3/Olmo3 olmo_hybrid/OlmoHybrid olmoe/Olmoe
openai_privacy_filter/OpenAIPrivacyFilter ovis2/Ovis2 paddleocr_vl/PaddleOCR pe_audio/PeAudioEncoder
pe_audio_video/PeAudioVideoEncoder pe_video/PeVideoEncoder phi3/Phi3 phi4_multimodal/Phi4Multimodal
pixtral/Pixtral qianfan_ocr/QianfanOCRVision qwen2/Qwen2 qwen2_5_omni/Qwen2_5Omni
qwen2_5_vl/Qwen2_5_VL qwen2_moe/Qwen2Moe qwen2_vl/Qwen2VL qwen3/Qwen3 qwen3_5/Qwen3_5
qwen3_5_moe/Qwen3_5Moe qwen3_moe/Qwen3Moe qwen3_next/Qwen3Next
qwen3_omni_moe/Qwen3OmniMoeThinkerText qwen3_omni_moe/Qwen3OmniMoeText qwen3_omni_moe/Qwen3OmniMoe
qwen3_omni_moe/Qwen3OmniMoeCode2Wav qwen3_vl/Qwen3VLText qwen3_vl_moe/Qwen3VLMoeText
qwen4_exp/Qwen4ExpText recurrent_gemma/RecurrentGemma sapiens2/Sapiens2 seed_oss/SeedOss
smollm3/SmolLM3 solar_open/SolarOpen step3p7/Step3p7 t5gemma/T5Gemma t5gemma2/T5Gemma2
timesfm/TimesFm timesfm2_5/TimesFm2_5 ultrabert/Ultrabert ultravbert/UltraVBert
unlimited_ocr/UnlimitedOcrText vaultgemma/VaultGemma vibevoice/VibeVoice
vibevoice_acoustic_tokenizer/VibeVoiceAcousticTokenizer vibevoice_asr/VibeVoiceAsr
voxtral_realtime/VoxtralRealtime xcodec2/Xcodec2 youtu/Youtu zamba/Zamba zamba2/Zamba2 zaya/Zaya
"""
_OTHERS = """
bailing_hybrid/BailingHybridRMSNormGated bamba/BambaRMSNormGated cohere/CohereLayerNorm
cohere2/Cohere2LayerNorm cohere2_moe/Cohere2MoeLayerNorm cohere_compass/CohereCompassLayerNorm
conditional_detr/ConditionalDetrFrozenBatchNorm2d cpmant/CpmAntLayerNorm
d_fine/DFineFrozenBatchNorm2d dab_detr/DabDetrFrozenBatchNorm2d deberta/DebertaLayerNorm
deformable_detr/DeformableDetrFrozenBatchNorm2d deimv2/Deimv2FrozenBatchNorm2d
detr/DetrFrozenBatchNorm2d esm/esmfold/EsmFoldLayerNorm
falcon_h1/FalconH1RMSNormGated gemma3n/Gemma3nAudioCumulativeGroupNorm
glm5_next/Glm5NextTextRMSNormGated gradium_phonon_tts/GradiumPhononTTSTimestepNorm
granitemoehybrid/GraniteMoeHybridRMSNormGated grounding_dino/GroundingDinoFrozenBatchNorm2d
imagegpt/ImageGPTLayerNorm
kimi_linear/KimiLinearRMSNormGated kosmos2_5/Kosmos2_5LayerNorm longt5/LongT5LayerNorm
mamba2/MambaRMSNormGated mm_grounding_dino/MMGroundingDinoFrozenBatchNorm2d mobilebert/NoNorm
moonshine_streaming/MoonshineStreamingLayerNorm
mt5/MT5LayerNorm nemotron_h/NemotronHRMSNormGated olmo_hybrid/OlmoHybridRMSNormGated
phi4_multimodal/Phi4MultimodalAudioMeanVarianceNormLayer
pix2struct/Pix2StructLayerNorm pocket_tts/PocketTTSTimestepNorm pop2piano/Pop2PianoLayerNorm
pp_doclayout_v2/PPDocLayoutV2FrozenBatchNorm2d pp_doclayout_v3/PPDocLayoutV3FrozenBatchNorm2d
pp_doclayout_v4/PPDocLayoutV4FrozenBatchNorm2d
qwen3_5/Qwen3_5RMSNormGated qwen3_5_moe/Qwen3_5MoeRMSNormGated qwen3_next/Qwen3NextRMSNormGated
qwen4_exp/Qwen4ExpTextRMSNormGated rt_detr/RTDetrFrozenBatchNorm2d
rt_detr_v2/RTDetrV2FrozenBatchNorm2d switch_transformers/SwitchTransformersLayerNorm t5/T5LayerNorm
table_transformer/TableTransformerFrozenBatchNorm2d
udop/UdopLayerNorm umt5/UMT5LayerNorm vitdet/VitDetLayerNorm zamba2/Zamba2RMSNormGated
zaya/ZayaQKNorm
"""
_TRANSFORMERS = [f"{entry}RMSNorm" for entry in _RMS_NORMS.split()] + _OTHERS.split()


def known_norms() -> tuple[type[nn.Module], ...]:
    """The classes above that have been imported; nothing is imported here."""
    found = []
    for entry in _TRANSFORMERS:
        *where, name = entry.split("/")
        path = f"transformers.models.{where[0]}.modeling_{where[-1]}"
        if (kind := imported_class(path, name)) is not None:
            found.append(kind)
    frozen = imported_class("torchvision.ops.misc", "FrozenBatchNorm2d")
    return (*found, frozen) if frozen is not None else tuple(found)


def as_input(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
) -> object:
    """A forward hook: the output, or each of a tuple, in the dtype of the input, where that has 16
    bits."""
    x = next((i for i in (*args, *kwargs.values()) if isinstance(i, torch.Tensor)), None)
    if x is None or x.dtype not in LOW_PRECISION:
        return output
    if type(output) is tuple:
        return tuple(as_input(module, (x,), {}, each) for each in output)
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        return output.to(x.dtype)
    return output
