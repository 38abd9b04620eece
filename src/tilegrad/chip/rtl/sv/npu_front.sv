// The front end: program memory, fetch, loops and offsets; sends words to the three queues.

module npu_front #(
    parameter int WORDS = 128,
    parameter int BITS  = $clog2(WORDS)
) (
    input  logic            clk,
    input  logic            rst,
    input  logic            start,
    input  logic            write,      // of a quarter of a word of the program
    input  logic [BITS-1:0] write_row,
    input  logic [1:0]      write_part,
    input  logic [31:0]     write_data,
    input  logic [2:0]      full,
    output logic [2:0]      push,
    output logic [127:0]    sent,
    output logic            seed,
    output logic [31:0]     seed_value,
    output logic [1:0]      state,
    output logic [15:0]     pc
);
  localparam logic [1:0] FETCH = 2'd1, DECODE = 2'd2, HALT = 2'd3;
  wire [127:0] word;
  genvar part;
  generate
    for (part = 0; part < 4; part = part + 1) begin : g_part
      localparam logic [1:0] HERE = part;
      npu_sram #(.ROWS(WORDS), .WIDTH(32)) program_words (
          .clk(clk), .read(state == FETCH), .read_row(pc[BITS-1:0]), .q(word[part*32+:32]),
          .write(write && write_part == HERE), .write_row(write_row), .d(write_data));
    end
  endgenerate

  // Offsets of the sets, the steps of each level, and the loops that are open.
  logic [2:0] level;
  logic [15:0] offset_local[0:3];
  logic [31:0] offset_dram[0:3];
  logic [15:0] step_local[0:15];
  logic [31:0] step_dram[0:15];
  logic [15:0] saved_local[0:15];
  logic [31:0] saved_dram[0:15];
  logic [15:0] loop_start[0:3];
  logic [15:0] loop_left[0:3];

  logic [3:0] op;
  logic [1:0] inner, target;
  logic queued, moves, adds_result, blocked;
  assign op = word[3:0];
  assign inner = level[1:0] - 2'd1;
  assign moves = op == npu_words::OP_MOVE_IN || op == npu_words::OP_MOVE_OUT;
  assign adds_result = op == npu_words::OP_MATMUL || op == npu_words::OP_VECTOR
      || op == npu_words::OP_REDUCE;
  assign queued = moves || adds_result || op == npu_words::OP_PRELOAD || op == npu_words::OP_SYNC;
  always @* begin
    if (op == npu_words::OP_SYNC) target = word[5:4];
    else if (op == npu_words::OP_MOVE_IN) target = 2'd0;
    else if (op == npu_words::OP_MOVE_OUT) target = 2'd2;
    else target = 2'd1;
  end
  assign blocked = target == 2'd0 ? full[0] : target == 2'd1 ? full[1] : full[2];
  assign push = state == DECODE && queued && !blocked ? 3'd1 << target : 3'd0;

  logic [15:0] local_row, second_row, result_row;
  logic [31:0] dram;
  assign local_row = word[31:16]
      + (word[11:10] != 2'd0 && op != npu_words::OP_SYNC ? offset_local[word[11:10]] : 16'd0);
  assign second_row = word[47:32]
      + (op == npu_words::OP_MATMUL && word[93:92] != 2'd0 ? offset_local[word[93:92]] : 16'd0);
  assign result_row = word[63:48]
      + (adds_result && word[95:94] != 2'd0 ? offset_local[word[95:94]] : 16'd0);
  assign dram = word[127:96]
      + (moves && word[11:10] != 2'd0 ? offset_dram[word[11:10]] : 32'd0);
  assign sent = {dram, word[95:64], result_row, second_row, local_row, word[15:0]};

  logic again;
  assign again = loop_left[inner] != 16'd0;
  assign seed = state == DECODE && op == npu_words::OP_CONFIG && word[14];
  assign seed_value = word[127:96];

  always_ff @(posedge clk) begin
    if (rst) begin
      state <= 2'd0;
      pc <= 16'd0;
    end else if (start) begin
      state <= FETCH;
      pc <= 16'd0;
    end else if (state == FETCH) state <= DECODE;
    else if (state == DECODE) begin
      if (op == npu_words::OP_HALT || op > npu_words::OP_END) state <= HALT;
      else if (!(queued && blocked)) begin
        state <= FETCH;
        pc <= op == npu_words::OP_END && again ? loop_start[inner] : pc + 16'd1;
      end
    end
  end

  always_ff @(posedge clk) begin
    if (rst || start) begin
      level <= 3'd0;
      for (int i = 0; i < 4; i = i + 1) begin
        offset_local[i] <= 16'd0;
        offset_dram[i] <= 32'd0;
      end
      for (int i = 0; i < 16; i = i + 1) begin
        step_local[i] <= 16'd0;
        step_dram[i] <= 32'd0;
      end
    end else if (state == DECODE) begin
      if (op == npu_words::OP_CONFIG && !word[14]) begin
        step_local[word[13:10]] <= word[31:16];
        step_dram[word[13:10]] <= word[127:96];
      end else if (op == npu_words::OP_LOOP) begin
        loop_start[level[1:0]] <= pc + 16'd1;
        loop_left[level[1:0]] <= word[31:16] - 16'd1;
        for (int i = 0; i < 4; i = i + 1) begin
          saved_local[{level[1:0], i[1:0]}] <= offset_local[i];
          saved_dram[{level[1:0], i[1:0]}] <= offset_dram[i];
        end
        level <= level + 3'd1;
      end else if (op == npu_words::OP_END) begin
        for (int i = 0; i < 4; i = i + 1) begin
          offset_local[i] <= again ? offset_local[i] + step_local[{inner, i[1:0]}]
              : saved_local[{inner, i[1:0]}];
          offset_dram[i] <= again ? offset_dram[i] + step_dram[{inner, i[1:0]}]
              : saved_dram[{inner, i[1:0]}];
        end
        if (again) loop_left[inner] <= loop_left[inner] - 16'd1;
        else level <= level - 3'd1;
      end
    end
  end
endmodule
