//! Gemma 3 (Gemma Team 2025, arXiv 2503.19786): every head's queries and keys normed, norms behind attention and feed-forward too,
//! and of six layers five that see a window alone, at a RoPE of their own. Its files have the 1 already added that the original adds
//! to every norm's weights, and rotary pairs half a head apart.

use anyhow::{Result, ensure};
use kvfold::capture::RopeLayout;
use kvfold::rope::Rope;

use super::read::weight;
use super::{Activation, Config, Layer};
use crate::gguf::Gguf;

pub(super) const NAME: &str = "gemma3";
/// Layers of the model of 27 billion parameters.
const LAYERS_27B: usize = 62;

pub(super) fn config(file: &mut Gguf) -> Result<Config> {
    let mut config = Config::read(file, NAME)?;
    let window = file.size("gemma3.attention.sliding_window")?;
    let period = file.size_or("gemma3.attention.sliding_window_pattern", 6)?;
    ensure!(
        window > 0 && period > 0,
        "windows: wanted at least 1 token and 1 layer, had {window} and {period}"
    );
    // Positions of the layers that see everything may be scaled; those of the others never are.
    let theta = f64::from(file.float_or("gemma3.rope.freq_base_swa", 1e4)?);
    for (layer, (rope, seen)) in config.ropes.iter_mut().zip(&mut config.windows).enumerate() {
        if (layer + 1) % period != 0 {
            *rope = Rope::from_theta(config.head_dim, rope.rotary_dim(), theta, RopeLayout::HalfSplit)?;
            *seen = Some(u32::try_from(window)?);
        }
    }
    if config.layers == LAYERS_27B {
        // That one alone scales by the width of a head that all heads together would make the model's.
        config.scale = (config.heads as f64 / config.width as f64).sqrt() as f32;
    }
    config.embedding_scale = (config.width as f64).sqrt();
    config.activation = Activation::Gelu;
    Ok(config)
}

pub(super) fn layer(file: &mut Gguf, _: &Config, index: usize) -> Result<Layer> {
    let mut layer = Layer::read(file, index)?;
    layer.query_norm = Some(weight(file, index, "attn_q_norm")?);
    layer.key_norm = Some(weight(file, index, "attn_k_norm")?);
    layer.output_norm = Some(weight(file, index, "post_attention_norm")?);
    layer.down_norm = Some(weight(file, index, "post_ffw_norm")?);
    Ok(layer)
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file::Value;

    use super::*;
    use crate::tests::made::Made;

    fn made(layers: usize) -> Made {
        Made::new(NAME)
            .sizes(&[
                ("gemma3.block_count", layers),
                ("gemma3.embedding_length", 5376),
                ("gemma3.attention.head_count", 32),
                ("gemma3.attention.head_count_kv", 16),
                ("gemma3.attention.key_length", 128),
                ("gemma3.attention.sliding_window", 1024),
            ])
            .says("gemma3.attention.layer_norm_rms_epsilon", Value::F32(1e-6))
            .says("gemma3.rope.freq_base", Value::F32(1e6))
    }

    #[test]
    fn the_largest_model_scales_in_its_own_way() {
        let scale = |layers: usize| config(&mut made(layers).open(&format!("scale-{layers}"))).unwrap().scale;
        // `query_pre_attn_scalar` is 168 there, 5376 / 32, and the head's 128 otherwise.
        assert_eq!([62, 48].map(scale), [168.0f64, 128.0].map(|x| x.sqrt().recip() as f32));
    }

    #[test]
    fn files_may_say_how_layers_alternate() {
        let windows = |made: Made, test: &str| config(&mut made.open(test)).unwrap().windows;
        let [some, none] = [Some(1024), None];
        assert_eq!(windows(made(7), "alternate"), [some, some, some, some, some, none, some]);
        let every = made(3).sizes(&[("gemma3.attention.sliding_window_pattern", 2)]);
        assert_eq!(windows(every, "alternate-2"), [some, none, some]);
        let scaled = made(7).says("gemma3.rope.scaling.type", Value::String("yarn".to_owned()));
        let error = config(&mut scaled.open("alternate-yarn")).unwrap_err().to_string();
        assert_eq!(error, "RoPE scaling: wanted none or linear, had yarn");
    }
}
