// The policy loss of one token: the formulas of headway_kernels/policy_token.py, line by line, in fp32.
#pragma once

#include "device.h"
#include "headway_cuda.h"

namespace headway {

// The codes of objective.py: Family, Correction, Kl, Level.
enum Family : int { kClip = 0, kCap = 1, kGate = 2, kTv = 3, kM2 = 4 };
enum Correction : int { kNoCorrection = 0, kTis = 1, kIcepop = 2, kMis = 3 };
enum Kl : int { kNoKl = 0, kK1 = 1, kK2 = 2, kK3 = 3 };
enum Level : int { kTokenLevel = 0, kSequence = 1, kGeometric = 2 };

// One weighted token; log_q and log_rho are formed at their levels, reference and entropy are 0 where not given.
struct PolicyToken {
    float weight, advantage, logp, behaviour, log_q, log_rho, reference, entropy;
    bool has_reference;
    bool beyond_m2;  // (pi - mu)^2 > m2_limit, which the caller compares in fp64
};

// What the token adds; `slope` is by log q and not yet times its weight, `kl_coefficient` is.
struct PolicyTerms {
    float value, slope, kl_coefficient, ratio, clamped, objective_ratio, log_ratio;
    float kl_1, kl_2, kl_3;  // the reference KL's estimators, weighted by min(r, cap)
    bool high, low, dual, capped, rejected;
};

HEADWAY_INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Value, slope and bounds met of the objective's own term.
HEADWAY_INLINE void policy_surrogate(const HeadwayPolicyOptions& options, const PolicyToken& token, float q,
                                     PolicyTerms& out) {
    float advantage = token.advantage;
    bool gains = advantage > 0.0f, loses = advantage < 0.0f;
    if (options.family == kClip) {
        out.high = gains && q > options.clip_upper;
        out.low = loses && q < options.clip_lower;
        out.dual = loses && q > options.dual_clip;
        float bounded = out.dual ? options.dual_clip : (out.high ? options.clip_upper : (out.low ? options.clip_lower : q));
        out.value = -(bounded * advantage);
        out.slope = out.high || out.low || out.dual ? 0.0f : out.value;
    } else if (options.family == kCap) {
        out.capped = q > options.cap;
        out.slope = -(cap_keeping_nan(q, options.cap) * advantage);
        out.value = out.slope * token.logp;
    } else if (options.family == kGate) {
        float tau = gains ? options.gate_positive : options.gate_negative;
        float opened = sigmoid(tau * (q - 1.0f)), shut = sigmoid(tau * (1.0f - q));
        out.value = -advantage * opened * (4.0f / tau);
        out.slope = -4.0f * advantage * q * opened * shut;
    } else {
        if (options.family == kTv) {
            float moved = fabsf(expf(cap_keeping_nan(token.behaviour, 0.0f)) - expf(cap_keeping_nan(token.logp, 0.0f)));
            out.rejected = ((gains && q > 1.0f) || (loses && q < 1.0f)) && moved > options.tv_bound;
        } else {
            out.rejected = token.beyond_m2;
        }
        out.value = out.rejected ? 0.0f : -(q * advantage);
        out.slope = out.value;
    }
}

// The weight of rho, times value and slope.
HEADWAY_INLINE void policy_correction(const HeadwayPolicyOptions& options, float rho, PolicyTerms& out) {
    bool above = rho > options.correction_cap;
    float factor = rho;
    if (options.correction == kTis) {
        out.capped = above;
        factor = cap_keeping_nan(rho, options.correction_cap);
    } else {
        out.rejected = above || (options.correction == kIcepop && rho < options.correction_floor);
        if (out.rejected) factor = 0.0f;
    }
    out.value *= factor;
    out.slope *= factor;
    out.objective_ratio = rho;
}

// Everything that a weighted, finite token adds.
HEADWAY_INLINE PolicyTerms policy_terms(const HeadwayPolicyOptions& options, const PolicyToken& token) {
    PolicyTerms out{};
    out.log_ratio = token.logp - token.behaviour;
    out.ratio = bounded_exp(out.log_ratio);
    out.clamped = cap_keeping_nan(out.ratio, options.cap);
    float q = bounded_exp(token.log_q);
    out.objective_ratio = q;
    policy_surrogate(options, token, q, out);
    if (options.correction != kNoCorrection) policy_correction(options, bounded_exp(token.log_rho), out);
    if (token.has_reference) {
        float e = token.logp - token.reference;
        float decay = expm1f(clamp_keeping_nan(-e, -kMaxExponent, kMaxExponent));
        out.kl_1 = out.clamped * e;
        out.kl_2 = out.clamped * (e * e) * 0.5f;
        out.kl_3 = out.clamped * (decay + e);
        if (options.kl != kNoKl) {
            float slope = options.kl == kK3 ? -(out.clamped * decay) : out.kl_1;
            out.value += options.kl_coef * (options.kl == kK1 ? out.kl_1 : (options.kl == kK2 ? out.kl_2 : out.kl_3));
            out.kl_coefficient = options.kl_coef * token.weight * slope;
        }
    }
    if (options.entropy_coef != 0.0f) out.value -= options.entropy_coef * token.entropy;
    return out;
}

}  // namespace headway
